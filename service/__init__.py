"""The gRPC service: authenticate, admit, translate, stream, observe. No torch in this process."""
