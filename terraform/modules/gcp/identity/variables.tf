variable "cluster" {
  description = "Name of the cluster."
  type        = string
}

variable "project" {
  description = "Project."
  type        = string
}

variable "bucket" {
  description = "Bucket for packages, checkpoints, and releases."
  type        = string
}

variable "data_buckets" {
  description = "Names of buckets with training data that workers may read."
  type        = list(string)
  default     = []
}

variable "pools" {
  description = "Names of the pools. The controller may terminate only their machines."
  type        = list(string)

  validation {
    condition     = length(setintersection(var.pools, ["control", "store", "replica"])) == 0
    error_message = "pools: no pool may be called control, store, or replica, because its machines could not be distinguished from those."
  }
}
