"""The tags of what weft sends over groups of ranks: two uses of one tag would take each other's messages.

Scripts get these groups too (``get_pp_process_group``) and send with tags of their own, mostly 0: none here is small.
"""

from __future__ import annotations

HEADERS, AHEAD, ASKED, BORROWED, OBJECTS = range(0x0B7EC0, 0x0B7EC5)
"""``AHEAD``: payloads whose receive is posted before they are sent; ``ASKED``: those that the receiver asks for after
it has read their header; ``BORROWED``: parameters for a comparison with one process; ``OBJECTS``: those of ``send``."""
