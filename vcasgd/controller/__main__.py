from vcasgd.controller.main import main

main()
