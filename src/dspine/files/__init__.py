"""Reading and writing drafter files, and the few things needed from a target's file."""
