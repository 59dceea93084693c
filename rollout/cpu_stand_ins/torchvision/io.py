"""Names of torchvision.io that SGLang imports."""

from torchvision import absent as decode_image
from torchvision import absent as decode_jpeg


class ImageReadMode:
    RGB = "RGB"
