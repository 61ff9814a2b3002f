"""Where bytes live below the device: buffers, stores, and the engines that move bytes. Knows no torch."""
