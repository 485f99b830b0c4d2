stop("this worker has no R harness yet")
