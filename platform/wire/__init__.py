"""Messages between gateway and worker, their codec, and the Bus that carries them."""
