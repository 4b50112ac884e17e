variable "cluster" {
  description = "Name of the cluster."
  type        = string
}

variable "pool" {
  description = "Name of the pool that uses the template."
  type        = string
}

variable "image" {
  description = "Image of the machines: Ubuntu 24.04, or one made from it with everything installed."
  type        = string

  validation {
    condition     = startswith(var.image, "ami-")
    error_message = "image must be an ID such as ami-0abc."
  }
}

variable "disk_gb" {
  description = "Size of each machine's disk."
  type        = number

  validation {
    condition     = var.disk_gb >= 10 && var.disk_gb <= 16384
    error_message = "disk_gb must be from 10 to 16384."
  }
}

variable "place" {
  description = "Security group and instance profile."
  type        = object({ security_group_id = string, profile = string })
}

variable "user_data" {
  description = "Cloud-config of the machines."
  type        = string
}
