#!/bin/sh
# MPI starts the ranks; in the script, gradwire.init_mpi_process_group("gloo") lets them meet.
#
#   sh mpirun.sh 4 train.py --epochs 3                   on this machine
#   HOSTS=n0:4,n1:4 sh mpirun.sh 8 train.py --epochs 3   four ranks on each of two
#
# Needs `pip install 'gradwire[mpi]'` against the MPI of this mpirun. MPICH and Open MPI both know -host and -n.
set -eu
ranks=${1:?no number of ranks: sh mpirun.sh 4 train.py}
shift
exec mpirun ${HOSTS:+-host "$HOSTS"} -n "$ranks" python "$@"
