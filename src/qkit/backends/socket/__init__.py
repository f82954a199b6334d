"""A native directory shared between processes: its owner serves it, the others are clients.

``wire`` has the bytes, ``address`` the file; ``server``, ``peer`` and ``claim`` are the owner's
side, ``commands`` what a person may type; ``client``, ``link``, ``claimed`` and ``renewal`` are the
client's.
"""
