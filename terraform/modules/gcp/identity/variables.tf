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
