variable "cluster" {
  description = "Name of the cluster."
  type        = string
}

variable "pool" {
  description = "Name of the pool that uses the template."
  type        = string
}

variable "region" {
  description = "Region of the template."
  type        = string
}

variable "machine" {
  description = "Image and disk of the machines. The type is a default; the controller sets it with each launch."
  type = object({
    image        = string
    disk_gb      = number
    default_type = string
    accelerator  = optional(object({ type = string, count = number }))
    gpus         = optional(number, 0)
    secure_boot  = optional(bool)
  })

  validation {
    condition     = var.machine.disk_gb >= 10 && var.machine.disk_gb <= 16384
    error_message = "machine.disk_gb must be from 10 to 16384."
  }
}

variable "place" {
  description = "Subnetwork and service account."
  type        = object({ subnetwork_id = string, account = string })
}

variable "user_data" {
  description = "Cloud-config of the machines."
  type        = string
}

variable "private" {
  description = "Give the machines no public addresses."
  type        = bool
  default     = false
}
