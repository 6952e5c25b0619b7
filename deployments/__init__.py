"""The Serve applications: the front, and one deployment per capability."""
