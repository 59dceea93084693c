"""Names of torchvision.transforms.v2.functional that transformers imports."""

from torchvision.transforms.functional import InterpolationMode, pil_to_tensor
