"""Engines that hear and speak: transcription, voice activity, voices; and sound in files."""
