"""Parameters of which each replica keeps a share: for one partition by FSDP2, for several between steps."""
