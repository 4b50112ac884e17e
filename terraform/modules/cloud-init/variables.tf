variable "role" {
  description = "What the machine is."
  type        = string

  validation {
    condition     = contains(["control-plane", "store", "worker"], var.role)
    error_message = "role must be control-plane, store or worker."
  }
}

variable "cloud" {
  description = "Where it is."
  type        = string

  validation {
    condition     = contains(["aws", "gcp"], var.cloud)
    error_message = "cloud must be aws or gcp."
  }
}

variable "machine" {
  description = "What the scripts of infra/bin read from machine.env."
  type        = map(string)

  validation {
    condition     = alltrue([for value in values(var.machine) : !can(regex("['\\n]", value))])
    error_message = "machine: a value must not hold a quote or a line break."
  }
}

variable "settings" {
  description = "VCASGD_… and other variables of the services, without secrets."
  type        = map(string)
}

variable "files" {
  description = "Further files in /etc/vcasgd, by name."
  type        = map(string)
  default     = {}
}
