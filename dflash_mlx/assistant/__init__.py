"""What a coding assistant keeps and does around the engine: conversations, sessions, files, edits. It draws nothing."""
