"""Pictures of runs, by matplotlib; one kind of picture is one file.

They are drawn without pyplot: no window, no state, nothing that a notebook would see of it.
"""
