# What gpu_check.sh verifies and compile_ahead.sh compiles, by name: options of `tessera verify`, and the architectures whose code
# runs. Code for sm_90 is the portable kernels on Hopper, and Ada (sm_89) has an e4m3 kernel of its own.
declare -A verify_options=(
  [full]="--suite full" [long]="--suite long" [hostile]="--suite hostile" [repeat]="--suite full --filter det --repeat 100"
  [full_sm_89]="--suite full --filter e4m3"
)
declare -A verify_codes=(
  [full]=native,sm_80,sm_75 [long]=native,sm_75 [hostile]=native,sm_90 [repeat]=native [full_sm_89]=sm_89
)
