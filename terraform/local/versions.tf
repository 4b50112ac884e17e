terraform {
  # terraform_data is built in and needs no provider.
  required_version = ">= 1.11, < 2.0"
}
