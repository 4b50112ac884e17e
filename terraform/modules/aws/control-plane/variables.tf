variable "cluster" {
  description = "Name of the cluster."
  type        = string
}

variable "image" {
  description = "Image of the machine: Ubuntu 24.04."
  type        = string

  validation {
    condition     = startswith(var.image, "ami-")
    error_message = "image must be an ID such as ami-0abc."
  }
}

variable "instance_type" {
  description = "Type of the machine."
  type        = string
}

variable "place" {
  description = "Where it is: subnet, its fixed private address, security group, role and instance profile."
  type = object({
    subnet_id         = string
    private_address   = string
    security_group_id = string
    profile           = string
    role              = string
  })
}

variable "user_data" {
  description = "Cloud-config of the machine."
  type        = string
}

variable "ledger_disk" {
  description = "Volume that outlives the machine."
  type        = string
}

variable "public_address" {
  description = "Allocation ID of its fixed public address, or null."
  type        = object({ id = optional(string), attached = bool })
}

variable "fleet" {
  description = "Limits of the controller's launches: templates, subnets, security group, and role."
  type = object({
    launch_template_ids = list(string)
    subnet_ids          = list(string)
    security_group_id   = string
    role_arn            = string
  })
}
