variable "role" {
  description = "Role of the machine."
  type        = string

  validation {
    condition     = contains(["control-plane", "store", "replica", "worker"], var.role)
    error_message = "role must be control-plane, store, replica, or worker."
  }
}

variable "cloud" {
  description = "Cloud of the machine."
  type        = string

  validation {
    condition     = contains(["aws", "gcp"], var.cloud)
    error_message = "cloud must be aws or gcp."
  }
}

variable "machine" {
  description = "Variables in machine.env for the scripts in infra/bin."
  type        = map(string)

  validation {
    condition     = alltrue([for value in values(var.machine) : !can(regex("['\\n]", value))])
    error_message = "machine: a value must not contain a quote or a line break."
  }
}

variable "settings" {
  description = "Environment variables of the services, such as VCASGD_…, without secrets."
  type        = map(string)
}

variable "files" {
  description = "More files in /etc/vcasgd, by name."
  type        = map(string)
  default     = {}
}
