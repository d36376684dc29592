"""`weft rehearse` starts this: `python -m weft.torch.rehearse script.py arguments ...`."""

if __name__ == "__main__":
    from weft.torch.rehearse.run import main

    main()
