"""Code that two or more backends share.

May import: ``backend``, ``settings`` and the packages below them; no driver.
"""
