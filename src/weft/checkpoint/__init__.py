"""Checkpoints as files: their layout, how they appear at once or not at all, and how faults in them are found.

    <path>/newest                        the tag of the last checkpoint
    <path>/<tag>_partial/                one save; appears by a rename only
        rank-0000.safetensors            what rank 0 stored
        index.json                       every tensor's place, size and checksum, and all that is no tensor
        DONE                             size and checksum of index.json
    <path>/.saving-<tag>-<nonce>/        a save that is being written, or was given up
    <path>/.lock                         held by the job that writes here

Nothing here knows a framework's tensors: a tensor is a name, a dtype, a shape and a range of bytes.

    save     the ranks meet (meeting), each writes its part (part), and the save appears (folder, index, shard)
    agree    the ranks find (find) a save that is whole, the same on all of them
"""
