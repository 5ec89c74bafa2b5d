"""Puts this folder on sys.path, so that tests in subfolders can import `oracle`."""
