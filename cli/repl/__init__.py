"""The interactive chat: line editing, commands, drawing as text arrives."""
