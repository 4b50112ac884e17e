from vcasgd.runtime.controller.process import main

main()
