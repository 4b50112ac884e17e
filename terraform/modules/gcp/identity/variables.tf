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
    condition     = !contains(var.pools, "store") && !contains(var.pools, "control")
    error_message = "pools: no pool may be called store or control, because its machines could not be distinguished from those."
  }
}
