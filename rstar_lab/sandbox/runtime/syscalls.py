"""Numbers of the system calls that the filter allows, as name:x86_64:aarch64, or name:x86_64 if aarch64 does not have the call.

Source: asm/unistd_64.h and asm-generic/unistd.h of the Linux headers.
"""

Numbers = dict[str, tuple[int, int | None]]


def _parse(text: str) -> Numbers:
    calls = [call.split(":") for call in text.split()]
    return {name: (int(numbers[0]), int(numbers[1]) if numbers[1:] else None) for name, *numbers in calls}


# Allowed with any arguments, by group.
_ALLOWED = {
    "files": (
        "access:21 chdir:80:49 chmod:90 chown:92 close:3:57 copy_file_range:326:285 creat:85 dup:32:23 dup2:33 "
        "dup3:292:24 faccessat:269:48 faccessat2:439:439 fadvise64:221:223 fallocate:285:47 fchdir:81:50 "
        "fchmod:91:52 fchmodat:268:53 fchmodat2:452:452 fchown:93:55 fchownat:260:54 fstat:5:80 fstatfs:138:44 "
        "ftruncate:77:46 futimesat:261 getcwd:79:17 getdents:78 getdents64:217:61 lchown:94 link:86 linkat:265:37 "
        "lseek:8:62 lstat:6 mkdir:83 mkdirat:258:34 mknod:133 mknodat:259:33 newfstatat:262:79 open:2 "
        "openat:257:56 openat2:437:437 pread64:17:67 preadv:295:69 preadv2:327:286 pwrite64:18:68 pwritev:296:70 "
        "pwritev2:328:287 read:0:63 readlink:89 readlinkat:267:78 readv:19:65 rename:82 renameat:264:38 "
        "renameat2:316:276 rmdir:84 sendfile:40:71 splice:275:76 stat:4 statfs:137:43 statx:332:291 symlink:88 "
        "symlinkat:266:36 tee:276:77 truncate:76:45 umask:95:166 unlink:87 unlinkat:263:35 utime:132 "
        "utimensat:280:88 utimes:235 write:1:64 writev:20:66"
    ),
    "memory": (
        "brk:12:214 get_mempolicy:239:236 madvise:28:233 mincore:27:232 mprotect:10:226 mremap:25:216 munmap:11:215"
    ),
    "processes": (
        "execve:59:221 exit:60:93 exit_group:231:94 fork:57 get_robust_list:274:100 getegid:108:177 "
        "geteuid:107:175 getgid:104:176 getgroups:115:158 getpgid:121:155 getpgrp:111 getpid:39:172 "
        "getppid:110:173 getpriority:140:141 getresgid:120:150 getresuid:118:148 getrlimit:97:163 getrusage:98:165 "
        "getsid:124:156 gettid:186:178 getuid:102:174 kill:62:129 pidfd_open:434:434 pidfd_send_signal:424:424 "
        "sched_get_priority_max:146:125 sched_get_priority_min:147:126 sched_getaffinity:204:123 "
        "sched_getparam:143:121 sched_getscheduler:145:120 sched_rr_get_interval:148:127 sched_yield:24:124 "
        "set_robust_list:273:99 set_tid_address:218:96 setpgid:109:154 setsid:112:157 tgkill:234:131 tkill:200:130 "
        "vfork:58 wait4:61:260 waitid:247:95"
    ),
    "signals": (
        "alarm:37 pause:34 restart_syscall:219:128 rt_sigaction:13:134 rt_sigpending:127:136 rt_sigprocmask:14:135 "
        "rt_sigreturn:15:139 rt_sigsuspend:130:133 rt_sigtimedwait:128:137 sigaltstack:131:132 signalfd:282 "
        "signalfd4:289:74"
    ),
    "events and time": (
        "clock_getres:229:114 clock_gettime:228:113 clock_nanosleep:230:115 epoll_create:213 epoll_create1:291:20 "
        "epoll_ctl:233:21 epoll_pwait:281:22 epoll_pwait2:441:441 epoll_wait:232 eventfd:284 eventfd2:290:19 "
        "futex:202:98 getitimer:36:102 gettimeofday:96:169 nanosleep:35:101 pipe:22 pipe2:293:59 poll:7 "
        "ppoll:271:73 pselect6:270:72 rseq:334:293 select:23 setitimer:38:103 time:201 timer_create:222:107 "
        "timer_delete:226:111 timer_getoverrun:225:109 timer_gettime:224:108 timer_settime:223:110 "
        "timerfd_create:283:85 timerfd_gettime:287:87 timerfd_settime:286:86 times:100:153"
    ),
    "Unix sockets": (
        "accept:43:202 accept4:288:242 bind:49:200 connect:42:203 getpeername:52:205 getsockname:51:204 "
        "getsockopt:55:209 listen:50:201 shutdown:48:210"
    ),
    "System V IPC": (
        "semctl:66:191 semget:64:190 semop:65:193 semtimedop:220:192 shmat:30:196 shmctl:31:195 shmdt:67:197"
    ),
    "information": ("arch_prctl:158 getcpu:309:168 getrandom:318:278 sysinfo:99:179 uname:63:160"),
}
ALLOWED = {group: _parse(text) for group, text in _ALLOWED.items()}
# Allowed or refused depending on their arguments (seccomp.py).
CHECKED = _parse(
    "clone:56:220 clone3:435:435 close_range:436:436 fcntl:72:25 fdatasync:75:83 flock:73:32 fsync:74:82 "
    "ioctl:16:29 membarrier:324:283 memfd_create:319:279 mmap:9:222 msync:26:227 prctl:157:167 prlimit64:302:261 "
    "recvfrom:45:207 recvmmsg:299:243 recvmsg:47:212 sendmmsg:307:269 sendmsg:46:211 sendto:44:206 "
    "setrlimit:160:164 setsockopt:54:208 shmget:29:194 socket:41:198 socketpair:53:199 sync_file_range:277:84"
)
NUMBERS: Numbers = {name: numbers for group in (*ALLOWED.values(), CHECKED) for name, numbers in group.items()}
