"""Replaying a core's graphs: memory, native libraries and steps. One file a target; nothing here compiles anything."""
