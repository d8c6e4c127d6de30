"""What autograd saves for backward, packed inside the compiled forward and unpacked inside the compiled backward."""
