"""Engines behind one asynchronous protocol (``base``); each imports its library only when it is made."""
