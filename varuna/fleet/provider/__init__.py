"""Where machines come from: one small seam, asked again and again for the size that the run wants."""
