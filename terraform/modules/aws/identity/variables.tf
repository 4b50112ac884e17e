variable "cluster" {
  description = "Name of the cluster."
  type        = string
}

variable "bucket_arn" {
  description = "The bucket of packages, checkpoints and releases."
  type        = string
}
