locals {
  scripts = "${path.module}/../../infra/local"
  home    = var.home == null ? "" : var.home
}

# The stack is not in Terraform's state: creating this resource starts it, destroying it stops
# it. To start it again after a reboot: terraform apply -replace=terraform_data.stack
resource "terraform_data" "stack" {
  input = {
    scripts = local.scripts
    home    = local.home
  }

  triggers_replace = [local.home, var.port]

  provisioner "local-exec" {
    command = "exec \"$SCRIPTS/up\" \"$STACK_HOME\" \"$STACK_PORT\" \"$STACK_PYTHON\""

    environment = {
      SCRIPTS      = local.scripts
      STACK_HOME   = local.home
      STACK_PORT   = var.port
      STACK_PYTHON = var.python
    }
  }

  provisioner "local-exec" {
    when    = destroy
    command = "exec \"$SCRIPTS/down\" \"$STACK_HOME\""

    environment = {
      SCRIPTS    = self.input.scripts
      STACK_HOME = self.input.home
    }
  }
}
