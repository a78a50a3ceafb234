"""The process that runs a program written by a model.

`runner` is its script, `policy` the allowlist for the language, `kernel` the confinement of the process, `syscalls` the
seccomp filter. The first three run in the child process and import only the standard library.
"""
