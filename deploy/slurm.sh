#!/usr/bin/env bash
# Ray on the nodes of one Slurm job, and a run on it. Not run here: see deploy/README.md.
#     sbatch --nodes 8 deploy/slurm.sh fleet.toml
#SBATCH --job-name=rollmill
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
set -euo pipefail

export RAY_worker_niceness=0 # otherwise Ray gives all processes of a run the low priority 15
configuration="${1:?the RUN.toml}"
port=6379
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
head="$(srun --nodes 1 --ntasks 1 --nodelist "${nodes[0]}" hostname --ip-address | cut -d ' ' -f 1)"

srun --nodes 1 --ntasks 1 --nodelist "${nodes[0]}" --overlap \
  ray start --head --node-ip-address="$head" --port="$port" --labels region=home --block &
until srun --nodes 1 --ntasks 1 --nodelist "${nodes[0]}" --overlap ray status --address="$head:$port" >/dev/null 2>&1; do
  sleep 2
done
if [[ "${#nodes[@]}" -gt 1 ]]; then
  others="$(IFS=,; echo "${nodes[*]:1}")"
  srun --nodes "$((${#nodes[@]} - 1))" --ntasks "$((${#nodes[@]} - 1))" --nodelist "$others" --overlap \
    ray start --address="$head:$port" --labels region=home --block &
fi

# In the foreground: the job ends with the run. `rollmill status STORE/ID` shows it from anywhere.
srun --nodes 1 --ntasks 1 --nodelist "${nodes[0]}" --overlap rollmill train "$configuration"
