"""Events, metrics, health and traces of a service.

May import: ``settings``, ``codec`` and the packages below them.
"""
