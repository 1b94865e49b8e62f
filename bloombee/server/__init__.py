"""Handler, scheduler, executor and the wiring of one server."""
