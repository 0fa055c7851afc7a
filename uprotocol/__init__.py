"""uProtocol in Python: the types and rules of the specification. No sockets, no files, no threads.

uri  uuid  status  <-  attributes  <-  message  <-  transport (uP-L1)  <-  communication (uP-L2)
v1/ core/              generated from proto/ by `make proto`
"""
