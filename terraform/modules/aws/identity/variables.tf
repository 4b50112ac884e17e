variable "cluster" {
  description = "Name of the cluster."
  type        = string
}

variable "bucket_arn" {
  description = "Bucket for packages, checkpoints, and releases."
  type        = string
}
