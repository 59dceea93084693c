"""Names of torchvision.transforms.functional that SGLang imports."""

from torchvision import absent as pil_to_tensor
from torchvision.transforms import InterpolationMode
