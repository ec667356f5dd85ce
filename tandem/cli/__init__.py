"""The `tandem` command: one module per sub-command.

Modules import what they need inside the command, so that `--help` never loads torch.
"""
