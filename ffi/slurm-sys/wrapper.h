/* SPDX-License-Identifier: GPL-2.0-or-later
 * What bindgen reads, and what must hold for the numbers that ffi/slurm repeats because bindgen evaluates no
 * function-like macros (SLURM_BIT).
 */
#include <slurm/slurm_version.h>
#include <slurm/slurm.h>
#include <slurm/slurm_errno.h>
#include <slurm/spank.h>

#if SLURM_VERSION_NUMBER < SLURM_VERSION_NUM(22, 5, 0)
#error "Pliant needs Slurm 22.05 or newer"
#endif

static const unsigned int PLIANT_SLURM_VERSION = SLURM_VERSION_NUMBER;

#define MOVED "slurm.h has moved a flag that ffi/slurm/src/client/names.rs repeats"
#define AT(flag, n) ((flag) == (1u << (n)))
_Static_assert(AT(JOB_REQUEUE, 10) && AT(JOB_REQUEUE_HOLD, 11) && AT(JOB_SPECIAL_EXIT, 12) && AT(JOB_RESIZING, 13) &&
	       AT(JOB_CONFIGURING, 14) && AT(JOB_COMPLETING, 15) && AT(JOB_STOPPED, 16) &&
	       AT(JOB_POWER_UP_NODE, 18) && AT(JOB_REVOKED, 19) && AT(JOB_SIGNALING, 22), MOVED);
_Static_assert(AT(NODE_STATE_RES, 5) && AT(NODE_STATE_UNDRAIN, 6) && AT(NODE_STATE_CLOUD, 7) &&
	       AT(NODE_STATE_DRAIN, 9) && AT(NODE_STATE_COMPLETING, 10) && AT(NODE_STATE_NO_RESPOND, 11) &&
	       AT(NODE_STATE_POWERED_DOWN, 12) && AT(NODE_STATE_FAIL, 13) && AT(NODE_STATE_POWERING_UP, 14) &&
	       AT(NODE_STATE_MAINT, 15) && AT(NODE_STATE_REBOOT_REQUESTED, 16) &&
	       AT(NODE_STATE_POWERING_DOWN, 18) && AT(NODE_STATE_REBOOT_ISSUED, 20) &&
	       AT(NODE_STATE_PLANNED, 21) && AT(NODE_STATE_INVALID_REG, 22) && AT(NODE_STATE_POWER_DOWN, 23), MOVED);
_Static_assert(JOB_DEF_CPU_PER_GPU == 1 && JOB_DEF_MEM_PER_GPU == 2 && SHOW_MIXED == 8 && KILL_FULL_JOB == 8, MOVED);
_Static_assert(SHOW_ALL == 1 && SHOW_DETAIL == 2 && PART_FLAG_DEFAULT == 1, MOVED);
_Static_assert(PREEMPT_MODE_SUSPEND == 1 && PREEMPT_MODE_REQUEUE == 2 && PREEMPT_MODE_CANCEL == 8 &&
	       PREEMPT_MODE_WITHIN == 0x4000 && PREEMPT_MODE_GANG == 0x8000, MOVED);
