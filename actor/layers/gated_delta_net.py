"""placeholder"""


class GatedDeltaNet: ...
