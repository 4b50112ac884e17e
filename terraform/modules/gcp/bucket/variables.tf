variable "name" {
  description = "Name of the bucket."
  type        = string

  validation {
    condition     = can(regex("^[a-z0-9][a-z0-9-]{1,61}[a-z0-9]$", var.name))
    error_message = "name must have 3 to 63 lowercase letters, digits, and dashes."
  }
}

variable "location" {
  description = "Region of the bucket."
  type        = string
}

variable "keep" {
  description = "Only destroy the bucket when it is empty."
  type        = bool
}

variable "releases" {
  description = "Files to upload under release/, by name: the wheel and its constraints."
  type        = map(string)
  default     = {}

  validation {
    condition     = alltrue([for path in values(var.releases) : fileexists(path)])
    error_message = "releases: no such file; build the wheel with: pip wheel --no-deps --wheel-dir dist ."
  }
}
