from vcasgd.cli import main

main()
