"""Confined children: processes that work on what a visitor wrote, behind walls of the kernel."""
