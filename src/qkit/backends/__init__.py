"""Backends: one package per broker, and one for the native engine.

A package is imported when its backend is opened, so only that backend's driver must be installed.
May import: ``backend``, ``settings``, ``native`` and the packages below them, but not ``sending``
or ``consuming``.
"""
