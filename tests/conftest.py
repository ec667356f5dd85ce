"""Settings that every test shares."""

import torch

# The suite shares two cores with the service processes it starts.
torch.set_num_threads(1)
