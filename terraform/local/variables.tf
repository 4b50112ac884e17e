variable "home" {
  description = "Folder of the stack. Null: VCASGD_HOME or ~/.vcasgd, which the command line uses by default."
  type        = string
  default     = null

  validation {
    condition     = var.home == null || can(regex("^/[^']*$", var.home))
    error_message = "home must be an absolute path without quotes."
  }
}

variable "port" {
  description = "Port of the API on 127.0.0.1."
  type        = number
  default     = 8700

  validation {
    condition     = var.port >= 1024 && var.port <= 65535 && floor(var.port) == var.port
    error_message = "port must be from 1024 to 65535."
  }
}

variable "python" {
  description = "Python 3.11 or newer that creates the clone's environment if there is none."
  type        = string
  default     = "python3"

  validation {
    condition     = can(regex("^[A-Za-z0-9_./-]+$", var.python))
    error_message = "python must be a name such as python3.12, or a path."
  }
}
