"""The process that runs a program a model wrote.

`runner` is its script, `policy` the list of what a program may be written with, `kernel` the confinement of the
process, `syscalls` the filter for it. The first three run in the child and import nothing but the standard library.
"""
