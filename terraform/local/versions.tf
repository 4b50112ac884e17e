terraform {
  # terraform_data is built in, so that no provider has to be fetched
  required_version = ">= 1.11, < 2.0"
}
